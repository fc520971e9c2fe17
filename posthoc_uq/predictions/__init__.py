"""What a prediction is: classes, values or anything else with its uncertainty, and how outputs become one."""
